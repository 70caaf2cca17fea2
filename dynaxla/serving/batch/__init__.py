"""The batching server: requests of varying sizes are batched by bucket, run by one worker, and answered one by one."""
