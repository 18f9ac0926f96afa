"""Networks that predict acceptance: SpecDec++'s heads and improved MCSD's decision models."""
