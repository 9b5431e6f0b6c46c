"""What happens to KV outside the device pool: host memory and storage."""
