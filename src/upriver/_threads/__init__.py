"""Background threads, forks, and the end of the process.

No background thread delays the end of the process for long: a store or a server may not respond for minutes.
The end waits a moment all the same, as a thread that frees tensors during Python's shutdown may abort the
process.
"""
