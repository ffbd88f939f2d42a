"""The console script: starts the programs, holds no logic of theirs."""
