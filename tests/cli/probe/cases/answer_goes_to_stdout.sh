probe in out --threads 1
