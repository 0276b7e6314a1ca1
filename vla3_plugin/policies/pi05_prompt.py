"""The prompt of pi0.5, which holds the state as words. Constants alone: importing them loads no library."""

STATE_PROMPT = "Task: {task}, State: {state};\nAction: "
STATE_BINS = 256  # over [-1, 1] of the normalised state
STATE_NUMBERS = [str(i) for i in range(-1, STATE_BINS)]  # every word a state can hold; -1 is what lies below -1
