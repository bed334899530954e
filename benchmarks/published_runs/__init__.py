"""Compare the cost model with the runs that HAPI's authors published."""
