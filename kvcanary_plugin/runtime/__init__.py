"""The guard of one model runner and what it needs: true prefixes, the rotating pass, violations and their policy."""
