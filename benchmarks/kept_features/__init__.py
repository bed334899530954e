"""Measure whether jobs that keep frozen features are ahead of features kept by hand."""
