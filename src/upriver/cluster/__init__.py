"""Serve from more than one machine: replicas of the near-data server on Ray Serve.

Ray decides where replicas run, whether they live and how many there are. It never sees a tensor or a token.
Each replica keeps a server of its own, a plain ``upriver serve``, and writes that server's address into an
address book. Clients read the book over HTTP and stream straight from the servers. This package imports Ray
only when it is needed, and never torch.
"""
