"""Count the instructions of a call once a model has arrived."""
