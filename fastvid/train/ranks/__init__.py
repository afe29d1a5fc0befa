"""The processes of a job: joining the process group, rendezvous after a restart, stopping together."""
