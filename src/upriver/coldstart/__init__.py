"""Cold start: how a model's weights are published and grouped, so that it answers while they arrive."""
