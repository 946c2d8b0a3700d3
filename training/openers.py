"""First words of user turns, so that a target invents requests of every kind and not only of the kind it likes best.

Left alone, an instruction-tuned model mostly asks for advice. A head trained on such turns has seen little code,
arithmetic or extraction. The target goes on with each opener itself. None of three words or more begins a prompt that
heads are measured with, or they would be measured on what they were trained for.
"""

from __future__ import annotations

WRITING = (
    "Write a", "Write an email to", "Compose a", "Draft a", "Write a short story about", "Write an argument for",
    "Describe a", "Write a poem", "Create an outline for", "Correct the grammar of", "Rewrite the following",
    "Write a blog post", "Craft a", "Help me write a letter", "Give me a title for", "Write the first lines of",
    "Summarize the following text:", "Proofread this:", "Come up with", "Write a review of",
)  # fmt: skip
ROLE_PLAY = (
    "Let's pretend that", "Pretend to be", "Imagine being", "Play the part of", "You are", "Take on the role of",
    "Let's play a game.", "Imagine that", "Answer as if you were", "Speak as if you were",
    "Put yourself in the place of", "Suppose you could", "From now on you are",
)  # fmt: skip
REASONING = (
    "If", "Which of the following", "Three friends", "Suppose that", "Is it true that", "A man", "A woman",
    "Imagine there are", "Who", "Which is", "My brother has", "Yesterday", "Consider the following", "What is the next",
    "You have", "Can you solve this riddle?", "Find the odd one out:", "Given that", "True or false:",
    "How many", "Let's think step by step.",
)  # fmt: skip
MATH = (
    "Solve the", "What is the value of", "Calculate the", "Find the", "A store sells", "The sum of",
    "Solve this equation:", "If x =", "A train", "The price of", "What is the area of", "A rectangle has",
    "How much is", "The sides of", "Given the function f(x) =", "Prove that", "The remainder of",
    "The probability of", "What is 7 times", "Convert", "The mean of", "Let f(x)", "A company", "In a class of",
)  # fmt: skip
CODING = (
    "A Python function that", "I need a function", "Write a program", "Implement a", "In C++, write",
    "Create a Python script", "How do I use", "Write SQL that", "Fix the bug", "Explain this code",
    "Write JavaScript that", "Write an HTML page", "Given an array", "What does this code do?", "Write a regex",
    "Design an algorithm", "Make a web page", "Refactor this code", "In Python, how can I", "Create a class",
    "Write a bash script", "What is the difference between a list and", "Give me code for",
)  # fmt: skip
EXTRACTION = (
    "Extract the", "Extract all", "Identify the", "From the following text", "Here is some data:",
    "List the names", "Rate these", "Out of these", "Read the following", "Look at this text:",
    "Count the number of", "Classify the following", "Format the following", "Return the answer as JSON",
    "Which company", "Assign a score", "Based on the text,", "Find all",
)  # fmt: skip
SCIENCE = (
    "Explain the", "What is", "In chemistry,", "What causes", "How does", "Why does", "Describe how",
    "What are the", "How do vaccines", "Please explain", "Define", "Describe the structure", "Discuss the role of",
    "What happens when", "Explain why", "What is the boiling point", "List five", "What would happen if",
    "How is", "Cells",
)  # fmt: skip
HUMANITIES = (
    "Give an overview of", "How did", "Discuss the", "Compare and contrast", "Describe the historical", "Who was",
    "What brought about", "Analyze the", "Explain the significance of", "What does the Constitution",
    "What is the meaning of", "Plan a lesson", "In what ways", "Collect ideas", "Argue for", "What led to",
    "How have", "Describe the art", "What role did", "Why did",
)  # fmt: skip
EVERYDAY = (
    "I", "I want to", "Can you", "What should I", "Give me", "Recommend", "Plan a", "Suggest", "How can I", "Tell me",
    "Please", "My", "What's the best way to", "Translate", "Name three", "Make a list of", "Hello", "Help me", "List",
    "Should I", "Give an example of",
)  # fmt: skip
OPENERS = WRITING + ROLE_PLAY + REASONING + MATH + CODING + EXTRACTION + SCIENCE + HUMANITIES + EVERYDAY
