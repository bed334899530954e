"""Report what a server does: logs, metrics, traces, audit log, load."""
