// Sphinx's own scores, and on top of them: pages that answer a question come before those that document the source
var Scorer = {
  score: result => {
    const [docName, title, anchor, descr, score, filename] = result
    if (docName === 'tutorials/speed') return score + 13
    if (docName === 'api/coverage') return score + 11
    if (docName === 'api/learner') return score + 4
    if (docName === 'start' || docName.startsWith('howto/')) return score + 12
    if (docName.startsWith('tutorials/') || docName.startsWith('explanations/')) return score + 8
    return score + (/^(api\/|internals|changelog)/.test(docName) ? 0 : 4)
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
}
