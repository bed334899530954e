"""Choose the cuts of a job, and choose again while the job runs."""
