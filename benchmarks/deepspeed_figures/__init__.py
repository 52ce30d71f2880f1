"""The paper's figures, as the planner predicts them, next to what was measured."""
