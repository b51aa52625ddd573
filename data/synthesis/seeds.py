"""Openings of user turns, by subject, for self-prompted corpora.

The target writes the rest of a user turn that ends in "..."; the others are whole prompts. Braces are filled in at
random: {topic}, {thing}, {name}, {other}, {place}, {n}, {m}.
"""

from __future__ import annotations

import random
from typing import NamedTuple

OPENINGS: dict[str, tuple[str, ...]] = {
    "self": ("...",),
    "explanation": (
        "Explain {topic} to a beginner.",
        "What is {topic} and why does it matter?",
        "How does {topic} work?",
        "What are the main causes of {topic}?",
        "Describe the history of {topic} in a few sentences.",
        "What is the difference between {topic} and {topic}?",
        "Give a short summary of {topic}.",
        "Why is {topic} important for {thing}?",
        "What would be the best way to learn about {topic}?",
        "Describe how {topic} has changed over the last hundred years.",
        "What are three common misconceptions about {topic}?",
        "Can you explain...",
        "What happens when...",
        "Why do...",
        "Describe...",
        "What is the...",
        "How do I...",
        "Tell me about...",
        "Who...",
        "Compare...",
        "Discuss...",
    ),
    "code": (
        "Complete the following Python function.\n\ndef...",
        "Finish this code.\n\nfrom typing import List\n\n\ndef...",
        "Fill in the body of this function.\n\ndef...",
        'Complete this function.\n\ndef {function}({arguments}):\n    """...',
        'Write the body.\n\ndef {function}({arguments}):\n    """...',
        "Write a Python function that...",
        "Write a function called {function} that...",
        "Implement {function}({arguments}) in Python.",
        "Write a Python program to...",
        "Write a Python class for {thing}.",
        "How do I read a file line by line in Python and {action}?",
        "Fix the bug in this code:\n\n...",
        "Write a unit test for a function that...",
        "Explain what this code does:\n\nfor i in range({n}):...",
        "Write a SQL query that...",
        "Write a JavaScript function that...",
    ),
    "arithmetic": (
        "{name} has {n} {thing}s. {other} gives {name} {m} more {thing}s. How many {thing}s does {name} have now?",
        "{name} buys {n} {thing}s for ${m} each and pays with a ${k} bill. How much change is left?",
        "A {thing} costs ${n}. If the price falls by {m} percent, what is the new price?",
        "{name} reads {n} pages on Monday and twice as many on Tuesday. How many pages is that together?",
        "{name} and {other} share {k} {thing}s in the ratio {n}:{m}. How many does each of them get?",
        "There are {n} boxes with {m} {thing}s in each. {name} takes {o} {thing}s out. How many are left?",
        "A train travels {n} miles in {m} hours. What is its average speed?",
        "{name} earns ${n} an hour and works {m} hours a day, {o} days a week. "
        "How much does {name} earn in {p} weeks?",
        "A recipe for {o} people needs {n} grams of flour. How much flour does {name} need for {m} people?",
        "{name} is {n} years old. {other} is {m} years older than {name}. How old will {other} be in {o} years?",
        "{name} walks {n} blocks to the shop, then {m} blocks to the library, and then...",
        "{name} has {n} {thing}s...",
        "A farmer has...",
        "A shop sells {n} {thing}s...",
        "{name} and {other} are saving money for...",
        "In a class of {n} students...",
        "If a {thing} weighs {n} pounds...",
        "{name} drives {n} miles...",
        "Calculate...",
        "Solve for x:...",
        "What is {n} plus {m} times {o}?",
    ),
    "lists": (
        "List {o} facts about {topic}.",
        "Give me {o} ideas for {thing}s.",
        "Name {o} things to consider before buying a {thing}.",
        "What are {o} advantages of {topic}?",
        "Write a to-do list for {name}, who wants to learn about {topic}.",
        "Brainstorm {o} names for a shop that sells {thing}s.",
        "Suggest {o} questions for an interview about {topic}.",
        "Generate a list of...",
        "List the steps...",
        "Give me three examples of...",
        "Name five...",
        "Provide a list of...",
        "Arrange the following...",
        "Sort the following...",
    ),
    "rewriting": (
        "Rewrite the sentence so that it is in the past tense:...",
        "Correct the grammar of this sentence:...",
        "Make this text more formal:...",
        "Summarize the following paragraph:...",
        "Translate into simple words:...",
        "Turn this into a polite request:...",
        "Rewrite the following sentence...",
        "Edit the following text...",
        "Paraphrase...",
        "Classify the following...",
        "Identify the...",
        "Convert...",
        "Change the...",
        "Combine these two sentences:...",
        "Find a synonym for...",
        "Given the following text...",
    ),
    "dialogue": (
        "Write a dialogue between {name} and {other} about {topic}.",
        "Write a short story about {name}, who finds a {thing} in {place}.",
        "Write an email from {name} to {other} about {topic}.",
        "Write a poem about {topic}.",
        "Describe a day in {place} from the view of a {thing}.",
        "Pretend you are {name} from {place} and talk about {topic}.",
        "Write a product description for a {thing}.",
        "Write a conversation...",
        "Write a letter...",
        "Create a...",
        "Imagine...",
        "Compose...",
        "Generate a...",
        "Design...",
        "I am planning a trip to {place}...",
        "I feel...",
        "Hi, I...",
        "Should I...",
    ),
}


def _split(words: str) -> list[str]:
    return words.split("|")


TOPICS = _split(
    "photosynthesis|gravity|the water cycle|supply and demand|democracy|recycling|black holes|vaccines|inflation|"
    "machine learning|the French Revolution|volcanoes|the human heart|electric cars|renewable energy|"
    "the Roman Empire|honey bees|climate change|good sleep|meditation|chess|jazz music|the moon landing|"
    "plate tectonics|DNA|the stock market|public transport|gardening|coral reefs|the printing press|antibiotics|"
    "critical thinking|time management|exercise at home|healthy eating|world trade|the internet|encryption|"
    "dinosaurs|migration of birds|the Great Wall of China|coffee|chocolate|bread baking|marathon training|"
    "team work|remote work|social media|online privacy|artificial intelligence|quantum mechanics|"
    "the periodic table|acids and bases|friction|sound waves|rainbows|earthquakes|deserts|the Amazon rainforest|"
    "penguins|whales|octopuses|impressionist painting|classical music|opera|Shakespeare|science fiction|folk tales|"
    "the Olympics|football|swimming|yoga|stress|friendship|leadership|negotiation|budgeting|credit cards|insurance|"
    "taxes|start-ups|marketing|customer service|logistics|bridges|skyscrapers|robots|batteries|solar panels|"
    "nuclear power|space telescopes|satellites|maps|languages|grammar|public speaking|education|libraries|museums"
)
THINGS = _split(
    "apple|book|pencil|bicycle|lamp|garden chair|marble|ticket|cookie|notebook|candle|sticker|balloon|orange|"
    "toy car|flower|shirt|mug|phone|laptop|backpack|watch|table|painting|guitar|puzzle|egg|seashell|stamp|button|"
    "plant|cake|sandwich|ball|kite|drone|blanket"
)
NAMES = _split(
    "Maria|Tom|Aisha|Ben|Chloe|David|Elena|Farid|Grace|Hiro|Ines|Jack|Kavya|Leo|Mina|Noah|Olga|Pedro|Quinn|Rosa|"
    "Sam|Tara|Umar|Vera|Will|Yuki|Zoe"
)
PLACES = _split(
    "Lisbon|a small village|the mountains|Tokyo|an old castle|the desert|New York|a lighthouse|the forest|Cairo|"
    "a space station|Paris"
)
FUNCTIONS = _split(
    "count_vowels|is_prime|reverse_words|merge_sorted|flatten|find_duplicates|rotate_list|is_palindrome|"
    "sum_of_digits|largest_gap|word_lengths|remove_spaces|common_elements|running_total|second_largest|to_binary|"
    "fibonacci|factorial|unique_sorted|longest_word|is_anagram|chunk_list|clamp_values|even_positions|transpose|"
    "median_of|capitalize_all|parse_pairs|below_limit|matching_brackets|triangle_area|digits_sum|filter_by_prefix"
)
ARGUMENTS = _split(
    "numbers|text|items, n|a, b|values: list|s: str|n: int|numbers: List[int]|words: List[str], k: int|matrix|"
    "lst: list, limit: int|string: str"
)
ACTIONS = _split(
    "count the words|sum the numbers|print the longest line|skip empty lines|write the result to another file|"
    "find a word"
)


class Opening(NamedTuple):
    """A user turn, or its beginning where the target `continues` it."""

    subject: str
    text: str
    continues: bool


def opening(rng: random.Random) -> Opening:
    """Draw one: the subject first, all alike; then the wording and what fills it."""
    subject = rng.choice(sorted(OPENINGS))
    wording = rng.choice(OPENINGS[subject])
    name, other = rng.sample(NAMES, 2)
    numbers = {key: rng.randint(2, high) for key, high in {"n": 60, "m": 20, "o": 6, "p": 8}.items()}
    simple = {"{name}": name, "{other}": other, "{place}": rng.choice(PLACES), "{k}": str(rng.randint(3, 40) * 10)}
    simple |= {f"{{{key}}}": str(value) for key, value in numbers.items()}
    simple |= {
        "{function}": rng.choice(FUNCTIONS),
        "{arguments}": rng.choice(ARGUMENTS),
        "{action}": rng.choice(ACTIONS),
    }
    simple["{thing}"] = rng.choice(THINGS)
    text = wording
    for hole, value in simple.items():
        text = text.replace(hole, value)
    while "{topic}" in text:
        text = text.replace("{topic}", rng.choice(TOPICS), 1)
    return Opening(subject, text.removesuffix("..."), text.endswith("..."))
