"""What several benches use; the scripts beside this folder are the benches."""
