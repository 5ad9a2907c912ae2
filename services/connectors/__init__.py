"""How the number of processes changes where a mesh runs: a connector for each place, one promise of all."""
