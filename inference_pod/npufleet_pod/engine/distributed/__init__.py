"""One model on several devices of a pod: processes, what they tell each other, and what becomes of one that fails."""
