"""Load-aware split inference: a device runs the first stages of a network, a server the rest."""
