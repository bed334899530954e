"""Make a model callable while its weights arrive: construction, barrier, assignment."""
