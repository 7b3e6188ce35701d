"""A course of ten weeks, made of what the other rooms have.

    week        what a week is: what is read, solved, hunted, predicted and shown
    weeks       the ten weeks, as data
    times       how long it takes, estimated from what there is
    drawn       which command draws a figure
    midterm     questions with answers that functions give, and how they are marked
    project     models and clusters, and the planner's best layout of each
    answers     typical wrong answers, from the tests
    pages       all of that as Markdown, in pages/
    slides      a file of slides for each week
"""
