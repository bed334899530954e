"""Call near-data servers: HTTP client, discovery, verification, and choice among servers."""
