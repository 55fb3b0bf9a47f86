"""The built-in text: short stories written by a seeded probabilistic grammar.

Because the source of the text is known, so is its entropy: the loss in nats per character that
no model can beat on average.
"""

from random import Random
from typing import Any

from smallmind.text.grammar import Grammar

RULES = r"""
story: <opening> <wish>\n<trip> <sight>\n<trouble {want}><problem {trouble}> <talk> <attempt>\n
    <help> <solution {trouble}> <ending> <moral {trait}>\n\n

opening: <hero>{trait=<trait>}{hero} was a {trait} {child} with <find>, <find> and <find>.
    | <hero>{trait=<trait>}A {trait} {child} named {hero} had <find>, <find> and <find>.
hero: {hero=<boy>}{he=he}{his=his}{child=boy} | {hero=<girl>}{he=she}{his=her}{child=girl}
boy: Finn | Gus | Jack | Leo | Max | Paul
girl: Dora | Ella | Ivy | Kate | Nora | Zoe
trait: brave | kind | clever | patient

wish: {want=<want>}{kin=<kin>}{His} {kin} <sought> a <look> {want} to <use {want}>.
    | {want=<want>}{kin=<kin>}"Find a <look> {want} to <use {want}>," said {his} {kin}.
want: kite | drum | bell | lamp | hat | cake | sled | poem
kin: mother | father | sister | brother
use kite: fly over <find>
use drum: beat for <find>
use bell: ring for <find>
use lamp: shine on <find>
use hat: wear near <find>
use cake: eat with <find>
use sled: ride with <find>
use poem: read to <find>

trip: One <weather> <time> {hero} <went> past <find> and <find> to the {place=<place>}{place}.
    | At <time> {hero} took <find>, <find> and <find> to the {place=<place>}{place}.
place: beach | forest | market | river | castle | garden | farm | hill
sight: There {he} saw <sight {place}>, <find> and <find>.
    | By the <sight {place}> {he} saw <find>, <find> and <find>.
sight beach: shells | waves
sight forest: oaks | ferns
sight market: stalls | tents
sight river: reeds | stones
sight castle: towers | walls
sight garden: roses | plums
sight farm: carts | sacks
sight hill: rocks | thorns

trouble kite: {trouble=high} | {trouble=taken}
trouble drum: {trouble=shut} | {trouble=far}
trouble bell: {trouble=high} | {trouble=deep}
trouble lamp: {trouble=deep} | {trouble=shut}
trouble hat: {trouble=high} | {trouble=far}
trouble cake: {trouble=shut} | {trouble=taken}
trouble sled: {trouble=far} | {trouble=deep}
trouble poem: {trouble=far} | {trouble=taken}
problem high: {spot=<high>}A <look> {want} was up on a <look> {spot}!
problem deep: {spot=<deep>}A <look> {want} was deep in a <look> {spot}!
problem far: {spot=<far>}A <look> {want} was across a <look> {spot}!
problem shut: {spot=<shut>}A <look> {want} was shut in a <look> {spot}!
problem taken: {spot=<taken>}A <look> {want} was held by a <mood> {spot}!
high: tree | roof
deep: well | pond
far: lake | bog
shut: shed | chest
taken: fox | bear
talk: "<Oh>, how <bad>!" {he} <said> to <find>.
    | "<Oh>, how <bad>, like <find>!" {he} <said>.
attempt: {He} <loudly> threw <find> and <find> at the {spot}.
    | {He} <loudly> put <find> and <find> by the {spot}.

help: A <mood> {friend=<friend>}{friend} <cry {friend}> and <found> <find> and a <look>
    <tool {trouble}>.
    | A <mood> {friend=<friend>}{friend} <cry {friend}> by <find> and a <look> <tool {trouble}>.
friend: dog | hen | goat | pony | frog | lamb | crow | mule
cry dog: barked
cry hen: clucked
cry goat: bleated
cry pony: neighed
cry frog: croaked
cry lamb: baaed
cry crow: cawed
cry mule: brayed
tool high: ladder | rope
tool deep: bucket | net
tool far: raft | plank
tool shut: key | hammer
tool taken: pie | fish
solution high: {He} <loudly> climbed up it and got the {want}.
solution deep: {He} <loudly> let it down and got the {want}.
solution far: {He} <loudly> crossed on it and got the {want}.
solution shut: {He} <loudly> broke in with it and got the {want}.
solution taken: {He} <loudly> gave it away and got the {want}.

ending: At home {his} {kin} <smiled> and <did {want}>. {hero} got <find> and <find>.
    | {hero} ran home. {His} {kin} <smiled>, <did {want}> and gave {hero} <find>.
did kite: flew it over <find>
did drum: beat it for <find>
did bell: rang it for <find>
did lamp: shone it on <find>
did hat: wore it near <find>
did cake: ate it with <find>
did sled: rode it with <find>
did poem: read it to <find>
moral brave: Be brave, and you can face <find>. | A brave {child} can face <find>.
moral kind: Be kind, and you can help <find>. | A kind {child} can help <find>.
moral clever: Be clever, and you can use <find>. | A clever {child} can use <find>.
moral patient: Be patient, and you can get <find>. | A patient {child} can wait for <find>.

find: a <look> <thing> | a <look> <colour> <thing> | a <mood> <creature>
    | <two> <colour> <thing>s | <two> <mood> <creature>s
look: big | cold | dusty | fine | grand | hard | long | mossy | new | pale | rusty | soft | tiny
    | wide | flat | damp
colour: red | blue | green | white | pink | black | gold | tan
thing: bag | bead | bowl | cap | coin | cup | doll | fan | fork | gem | hoop | jar | jug | keg
    | lid | map | mug | nut | pan | pin | ring | rug | tub | wig
mood: bold | calm | dizzy | fussy | glad | happy | jolly | keen | lazy | mad | noisy | proud | quick
    | sad | tired | wise
creature: bat | bee | crab | cow | duck | eel | gull | hawk | jay | kid | lion | mole | moth | newt
    | owl | pig | rat | seal | swan | toad | vole | wasp | yak | ant
two: two | four | five | six | nine | ten

weather: sunny | windy | rainy | foggy
time: dawn | noon | dusk | night
sought: wanted | needed | missed
went: went | ran | rode | crept
found: found | saw | spotted
Oh: Oh | Look | Help | Dear me
bad: bad | nasty | silly | tricky
said: said | cried | laughed | yelled
loudly: loudly | slowly | quickly | gently | bravely | calmly | proudly | madly
smiled: smiled | laughed | cheered | danced
"""


MIN_CHARACTERS = 1_000_000  # of the built-in text, at least
# The settings of a run on it, unless a size is chosen: measured, see bench/LOG.md.
BUILT_IN_FIELDS: dict[str, Any] = {
    "n_embd": 48,
    "n_head": 3,
    "block_size": 128,
    "batch_size": 16,
    "steps": 1900,
}
# The entropy rate of the endless stream of stories, in nats per character: the entropy of a story
# over the expected length of a story. Stories are independent and each ends in the only empty line
# in it, so the characters determine where every story ends (the stream is self-delimiting) and, as
# no story has two derivations (the grammar is unambiguous), which choices made it. The first n
# stories therefore carry exactly n times the entropy of one. By the law of large numbers their
# length over n tends to the expected length, so the quotient is the entropy per character in the
# limit (a renewal argument; the entropy rate is that of Shannon, A Mathematical Theory of
# Communication, 1948, and of Cover & Thomas, chapter 4). No model that predicts the next character
# from the text before it has a smaller expected loss. A test computes it from the rules, exactly.
ENTROPY_PER_CHARACTER = 0.28832654418222364


def built_in_text(characters: int = MIN_CHARACTERS, seed: int = 1) -> str:
    """Writes complete stories of at least so many characters, the same for a seed everywhere."""
    random, grammar = Random(seed), Grammar(RULES)
    stories: list[str] = []
    written = 0
    while written < characters:
        stories.append(grammar.sample(random))
        written += len(stories[-1])
    return "".join(stories)
