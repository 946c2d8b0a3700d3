"""First words of user turns, so that a target invents requests of every kind and not only of the kind it likes best.

Left alone, an instruction-tuned model mostly asks for advice. A head trained on such turns has seen little code,
arithmetic or extraction. The target goes on with each opener itself.
"""

from __future__ import annotations

WRITING = (
    "Write a", "Write an email to", "Compose a", "Draft a", "Write a short story about", "Write a persuasive",
    "Describe a", "Write a poem", "Create an outline for", "Edit the following paragraph", "Rewrite the following",
    "Write a blog post", "Craft a", "Help me write a letter", "Give me a title for", "Write the opening of",
    "Summarize the following text:", "Proofread this:", "Come up with", "Write a review of",
)  # fmt: skip
ROLE_PLAY = (
    "Pretend you are", "Pretend to be", "Imagine you are", "Act as a", "You are a", "Take on the role of",
    "Let's play a game.", "Imagine that", "Answer as if you were", "Embrace the role of", "Picture yourself as",
    "Suppose you could", "Now you are",
)  # fmt: skip
REASONING = (
    "If", "Which of the following", "Three friends", "Suppose that", "Is it true that", "A man", "A woman",
    "Imagine there are", "Who", "Which is", "David has", "One morning", "Consider the following", "What is the next",
    "You have", "Can you solve this riddle?", "Which word does not belong", "Given that", "True or false:",
    "How many", "Let's think step by step.",
)  # fmt: skip
MATH = (
    "Solve the", "What is the value of", "Calculate the", "Find the", "A store sells", "The sum of", "Solve for x:",
    "If x =", "A train", "The price of", "What is the area of", "A rectangle has", "How much is", "The vertices of",
    "Given the function f(x) =", "Prove that", "When a number is divided", "The probability of", "What is 15",
    "Convert", "The average of", "Let f(x)", "A company", "In a class of",
)  # fmt: skip
CODING = (
    "Write a Python function", "Write a function", "Write a program", "Implement a", "Write a C++ program",
    "Develop a Python program", "How do I use", "Write a SQL query", "Fix the bug", "Explain this code",
    "Write a JavaScript function", "Write an HTML page", "Given an array", "What does this code do?", "Write a regex",
    "Design an algorithm", "Write a simple website", "Refactor this code", "In Python, how can I", "Create a class",
    "Write a bash script", "What is the difference between a list and", "Implement a function to find",
)  # fmt: skip
EXTRACTION = (
    "Extract the", "Extract all", "Identify the", "From the following text", "Given the following data",
    "List the names", "Evaluate the following", "Given these", "Read the following", "Analyze the following",
    "Count the number of", "Classify the following", "Format the following", "Return the answer as JSON",
    "Which company", "Assign a score", "Based on the text,", "Find all",
)  # fmt: skip
SCIENCE = (
    "Explain the", "What is the", "In the field of", "What causes", "How does", "Why does", "Describe the process",
    "What are the", "How do vaccines", "Please explain", "Define", "Describe the structure", "Discuss the role of",
    "What happens when", "Explain why", "What is the boiling point", "Describe five key", "What would happen if",
    "How is", "Photosynthesis",
)  # fmt: skip
HUMANITIES = (
    "Provide insights into", "How did", "Discuss the", "Compare and contrast", "Describe the historical", "Who was",
    "What were the main causes", "Analyze the", "Explain the significance of", "What does the Constitution",
    "What is the meaning of", "Create a lesson plan", "In what ways", "Share ideas", "Argue for", "What led to",
    "How have", "Describe the art", "What role did", "Why did",
)  # fmt: skip
EVERYDAY = (
    "I", "I want to", "Can you", "What should I", "Give me", "Recommend", "Plan a", "Suggest", "How can I", "Tell me",
    "Please", "My", "What's the best way to", "Translate", "Name three", "Make a list of", "Hello", "Help me", "List",
    "Should I", "Give an example of",
)  # fmt: skip
OPENERS = WRITING + ROLE_PLAY + REASONING + MATH + CODING + EXTRACTION + SCIENCE + HUMANITIES + EVERYDAY
