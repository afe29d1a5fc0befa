"""The processes of a job: joining, meeting again after a restart, ending together."""
