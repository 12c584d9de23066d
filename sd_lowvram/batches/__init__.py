"""Many jobs: read from a file, kept in a journal, painted by one worker or many, told while they run and afterwards."""
