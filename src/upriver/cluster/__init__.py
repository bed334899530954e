"""More than one machine: replicas of the near-data server on Ray Serve.

Ray says where replicas run, whether they live and how many there are; it never sees a tensor or a token. Each
replica keeps a server of its own, a plain ``upriver serve``, and writes that server's address into an address
book; clients read the book over HTTP and stream straight from the servers. Nothing here imports Ray before it
is needed, nor torch at all.
"""
