"""Make samples on the training node, in loader processes or in the training process."""
