"""The vocabulary of the generated tasks: short common words, each a token or two for the usual tokenizers."""

WORDS = tuple("""
apple arrow baker beach berry bird black bloom blue board boat bone book bowl box brain branch bread brick bridge brown
brush cabin cable cake camel camp candy card castle cedar chain chair chalk cheese cherry circle clay cliff clock cloud
coach coast coin copper coral corn cotton crane cream crow crown dance dawn deer desert dog door dragon dream drum duck
dust eagle earth elbow ember engine fabric falcon farm feather fern field finch fire flag flame flower forest fox frog
frost garden gate ghost glass globe gold grape grass green guitar hammer harbor hat hawk heart hill honey horse house
ice iron island ivory jacket jungle juice kettle key king kite ladder lake lamp lemon light lily lion lotus magnet maple
marble meadow melon metal milk mint mirror moon mouse music needle nest night north oak ocean olive onion orange orchid
otter owl paint panda paper peach pearl pencil pepper piano pine planet plum pocket pond prince pumpkin purple queen
rabbit radio rain raven red ribbon rice ring river road robin rock rocket roof root rose ruby sail salt sand school sea
seed shadow shark sheep shell ship silk silver sky smoke snow soap south spider spoon spring square star steam stone
storm straw sugar summer sun swan table tea tiger toast tower trail train tree truck tulip turtle valley velvet violin
wagon water wave wheat wheel whale white willow wind window winter wolf wood yellow zebra
""".split())

FOLDERS = ('bag', 'bin', 'data', 'desk', 'docs', 'drawer', 'items', 'notes', 'office', 'pack', 'room',
           'shelf', 'shop', 'stock', 'store', 'things', 'tools', 'work')
