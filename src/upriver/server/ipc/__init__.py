"""Exchange messages and memory between the front and its workers."""
