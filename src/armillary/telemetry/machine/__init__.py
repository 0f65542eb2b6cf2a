"""What this machine is and can do: what `armillary doctor` reports."""
