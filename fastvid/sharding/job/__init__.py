"""The sharding job: plan, lock, ledger, staging, runs and commit."""
