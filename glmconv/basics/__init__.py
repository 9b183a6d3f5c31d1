"""What every floor uses: errors, dtypes, digests, sizes, threads."""
