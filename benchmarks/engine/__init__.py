"""Speed of the engine on a CPU beside other engines: see `__main__`."""
