"""Compare chosen plans with every cut, measured."""
