"""Count the iterations until a plan follows a changed link."""
