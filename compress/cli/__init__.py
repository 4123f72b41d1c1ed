"""The command line: one file per verb, thin: parse, call, print. Heavy imports stay inside the commands."""
