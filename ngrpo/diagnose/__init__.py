"""`ngrpo diagnose`: before any training, how different and how valid a strategy's rollouts are."""
