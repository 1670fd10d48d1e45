"""What a vendor's graph optimiser would do, one rule a function; `lib.simplify` puts them together."""
