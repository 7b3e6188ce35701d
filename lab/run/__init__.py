"""The run with all instruments: it meters, holds to formulas and to one GPU, reports and writes."""
