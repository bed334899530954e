"""Convert an `nn.Module` to a program: capture, graph file, weights file, cuts, the tail."""
