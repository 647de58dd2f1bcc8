"""Models that replay an agent's recorded steps, and the preference pairs that come of it.

    client.py      one request to a server              scripted.py   a teacher for offline runs
    database.py    the file behind the next two         asking.py     cache, budget, limits and retries around a call
    cache.py       replies that were paid for           replay.py     every state x teacher -> answers
    budget.py      money and tokens, over processes     pairs.py      answers -> agreement -> pairs
    normalise.py   redaction.py, juicer.py: clean pairs pair_rows.py  pairs as token ids
    reference.py   a model's log-probs of both answers (the only module here that needs torch)
    named.py       a teacher of a spec, made         scoring.py    a teacher that reads hinted texts for a channel

Their settings stand in `plugins/teacher_settings.py`. To add a teacher, contribute a `TeacherPlugin` whose target is a
`protocols.TeacherSource`.
"""
