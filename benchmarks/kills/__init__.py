"""Kill processes of two servers, and compare the job with an undisturbed one."""
