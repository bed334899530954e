"""Keep samples as they are before the first random input stage, for later epochs and other jobs."""
