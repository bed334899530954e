"""One algorithm per file, equal signatures; siblings never import each other."""
