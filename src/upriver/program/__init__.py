"""From nn.Module to Program: capture, graph file, weights file, cuts, the tail."""
