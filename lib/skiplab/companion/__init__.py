"""What makes a notebook a paper companion: parameters, stored runs, the ledger, figures and their provenance."""
