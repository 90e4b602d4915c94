"""A few prompts of our own, for who has none at hand.

Scales and figures are as good as the prompts are like the traffic: these are better than random data, no more.
"""

from __future__ import annotations

NAME = "xpress-export's own"

CALIBRATION = (
    "A bakery sells 14 loaves in the morning and twice as many after noon. How many does it sell in a day?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain the difference between a virus and a bacterium to a ten-year-old.",
    "Write a Python function that returns the second largest number of a list.",
    "Summarize why the Roman Empire split into an eastern and a western half.",
    "Translate into French: The train to the coast leaves at half past seven.",
    "What should I cook with rice, two eggs, spinach and a lemon?",
    "Solve for x: 3x + 7 = 2x - 5. Show each step.",
    "Give five tips for learning to play the guitar as an adult.",
    "Write an email that asks a landlord to repair a leaking tap.",
    "What is the capital of Mongolia, and what is the country known for?",
    "Compare electric cars and hydrogen cars in a table with three rows.",
    'def gcd(a, b):\n    """Greatest common divisor of two integers."""\nComplete this function.',
    "My manager takes credit for my work. How can I bring it up without a quarrel?",
    "List the planets of the solar system by size, the largest first.",
    "Anna reads 12 pages on Monday and 5 more each following day. How many has she read by Friday evening?",
)
HELD_OUT = (
    "A farmer has 36 apples. He gives a third of them to his neighbor and eats two. How many are left?",
    "Write a poem of eight lines about the first snow of the year.",
    "Why is the sky blue in the daytime and red at sunset?",
    "Write a Python function that checks whether a word is a palindrome.",
    "Describe the water cycle in four sentences.",
    "How do I politely decline an invitation to a wedding?",
    "What are the advantages and disadvantages of working from home?",
    "A car drives 150 kilometers in two hours and 90 kilometers in the next hour. What is its average speed?",
    "Explain what an index of a database is and when it slows things down.",
    "Plan a weekend in Lisbon for two people who like music and food.",
    "Who was Marie Curie, and what did she discover?",
    'def count_vowels(text):\n    """Number of vowels in a text."""\nComplete this function.',
)
