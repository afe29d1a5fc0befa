"""What sharding costs in time, and encoding in quality."""
