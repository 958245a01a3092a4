"""What the drafter is: its configuration, its cell and the recurrent head."""
