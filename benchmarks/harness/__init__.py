"""Hold once what every benchmark needs: hosts and links, children, records, machine facts and tables."""
