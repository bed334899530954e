"""Answer requests from a device, a server or both, whichever is fastest now."""
